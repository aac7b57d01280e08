"""A client of the app, with a database of its own: a file of the test's folder."""

import pytest

from shop import Article, create_app, db


@pytest.fixture
def client(tmp_path, unfenced, monkeypatch):
    monkeypatch.setenv("FLASK_SECRET_KEY", "tests")
    app = create_app(f"sqlite:///{tmp_path}/shop.db")
    with app.app_context():
        db.create_all()
        with unfenced():
            db.session.add(Article(id=1, stock=10))
            db.session.commit()
    yield app.test_client()
    with app.app_context():
        db.engine.dispose()

"""Articles in stock: Flask-SQLAlchemy on SQLite. The locks are in a file beside the database."""

import os
import time

from flask import Flask, abort, request
from flask_admin import Admin
from flask_migrate import Migrate
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy import event
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

import fencelock
from admin import FencedView
from fencelock import FencedModel, fenced_lock, fenced_once
from fencelock.integrations.flask import answer_errors

TTL = int(os.environ.get("LOCK_TTL", "30"))  # seconds until another worker replaces one that stands still


class Base(DeclarativeBase): ...


db = SQLAlchemy(model_class=Base, session_options={"expire_on_commit": False})


class Article(FencedModel, db.Model):
    __tablename__ = "articles"
    __fence_resource__ = "article:{id}"
    id: Mapped[int] = mapped_column(primary_key=True)
    stock: Mapped[int]


fencelock.fence_table(db.metadata)  # both before `flask db migrate`
fencelock.receipt_table(db.metadata)


def create_app(url: str = "sqlite:///shop.db") -> Flask:  # which is instance/shop.db
    app = Flask(__name__)
    app.config.from_prefixed_env()  # FLASK_SECRET_KEY, which Flask-Admin needs
    app.config["SQLALCHEMY_DATABASE_URI"] = url
    db.init_app(app)
    Migrate(app, db)
    with app.app_context():
        fencelock.configure(db.engine)  # this database is the authority
        # SQLite only: transactions take turns from their beginning.
        event.listen(db.engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
    Admin(app).add_view(FencedView(Article, db))
    answer_errors(app)
    app.add_url_rule("/articles/<int:number>/take", view_func=take, methods=["POST"])
    app.add_url_rule("/articles/<int:number>/count", view_func=count, methods=["POST"])
    return app


@fenced_once("take:{number}:{key}", "article:{number}", ttl=TTL, timeout=2)
def take_one(session: Session, number: int, key: str) -> dict[str, int]:
    article = session.get_one(Article, number)
    article.stock -= 1
    return {"stock": article.stock}


def take(number: int) -> dict[str, int]:
    if not (key := request.headers.get("Idempotency-Key")):
        abort(400)
    db.session.rollback()  # ends the transaction that a login has begun
    return take_one(db.session, number, key)


def look_at_the_shelf(_number: int) -> int:
    """Stand for a clerk that counts, which takes its time."""
    time.sleep(float(os.environ.get("SHELF_SECONDS", "0")))
    return 7


def count(number: int) -> dict[str, int]:
    db.session.rollback()
    with fenced_lock(f"article:{number}", ttl=TTL, timeout=2):
        article = db.session.get_one(Article, number)
        db.session.commit()  # no transaction is open while the shelf is looked at
        article.stock = look_at_the_shelf(number)
        db.session.commit()
    return {"stock": article.stock}

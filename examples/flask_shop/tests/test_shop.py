import re

import pytest

from shop import Article, db

KEY = {"Idempotency-Key": "k1"}


@pytest.fixture
def stock(client):
    """Return what tells how many are in stock; None without the article."""

    def look():
        with client.application.app_context():
            article = db.session.get(Article, 1)
            return article and article.stock

    return look


def form_of(client):
    """Return what the page has that edits the article."""
    page = client.get("/admin/article/edit/?id=1").text
    assert "last_fencing_token" not in page
    write_id = re.search(r'name="last_write_id" type="hidden" value="(\d+)"', page)[1]
    return {"stock": "20", "last_write_id": write_id}


def test_take_counts_once(client):
    for _ in range(2):
        assert client.post("/articles/1/take", headers=KEY).json == {"stock": 9}
    assert client.post("/articles/1/take").status_code == 400
    assert client.post("/articles/2/take", headers=KEY).status_code == 404


def test_late_worker_is_refused(client, stock, stale_writer):
    with client.application.app_context():
        engine = db.engine
    with stale_writer(engine, Article, 1):
        late = client.post("/articles/1/count")
    assert (late.status_code, late.text, late.headers["Retry-After"]) == (409, "Conflict", "1")
    assert stock() == 10
    assert client.post("/articles/1/count").json == {"stock": 7}


def test_lost_lease_writes_nothing(client, stock, lost_lease):
    with lost_lease("article:1"):
        assert client.post("/articles/1/take", headers=KEY).status_code == 409
    assert stock() == 10


def test_admin_edits_creates_and_deletes(client, stock):
    assert client.post("/admin/article/edit/?id=1", data=form_of(client)).status_code == 302
    assert stock() == 20
    assert client.post("/admin/article/new/", data={"stock": "1"}).status_code == 302
    assert client.post("/admin/article/delete/", data={"id": "1"}).status_code == 302
    assert stock() is None
    assert client.post("/admin/article/action/", data={"action": "delete", "rowid": "2"}).status_code == 302
    assert "There are no items" in client.get("/admin/article/").text


@pytest.mark.parametrize("path", ["edit/?id=1", "delete/"])
def test_admin_waits_for_a_holder(client, stock, held_elsewhere, path):
    form = form_of(client) | {"id": "1"}
    with held_elsewhere("article:1"):
        assert client.post(f"/admin/article/{path}", data=form).status_code == 423
    assert stock() == 10


def test_admin_page_that_is_out_of_date_is_refused(client, stock):
    form = form_of(client)
    assert client.post("/articles/1/take", headers=KEY).json == {"stock": 9}
    assert client.post("/admin/article/edit/?id=1", data=form).status_code == 409
    assert stock() == 9

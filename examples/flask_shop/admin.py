"""Pages of Flask-Admin for a fenced model whose only key is made by the database."""

from typing import Any

from flask_admin.contrib.sqla import ModelView
from wtforms import HiddenField, IntegerField

from fencelock import FencedLock, FencelockError, fenced_lock


class HiddenInteger(IntegerField):
    widget = HiddenField.widget


class FencedView(ModelView):
    """Locks what it writes, and refuses the edit of a row that was written since its page was opened."""

    column_exclude_list = ("last_fencing_token", "last_write_id")
    form_excluded_columns = ("last_fencing_token",)
    form_overrides = {"last_write_id": HiddenInteger}

    def lock(self, model: Any) -> FencedLock[int]:
        resource = self.model.__fence_resource__.format(id=self.get_pk_value(model))
        self.session.session.rollback()  # the page has read; while the lock is waited for, nothing is open
        return fenced_lock(resource, timeout=2)

    def create_model(self, form: Any) -> Any:
        del form.last_write_id
        with fenced_lock(f"new:{self.model.__tablename__}", timeout=2):  # its own name is not known yet
            return super().create_model(form)

    def update_model(self, form: Any, model: Any) -> bool:
        with self.lock(model):
            return super().update_model(form, model)

    def delete_model(self, model: Any) -> bool:
        with self.lock(model):
            return super().delete_model(model)

    def handle_view_exception(self, exc: Exception) -> bool:
        if isinstance(exc, FencelockError):
            raise exc  # to the handler of the app, which shows nothing of what it says
        return super().handle_view_exception(exc)

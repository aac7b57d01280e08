"""The storage guard: makes the database refuse writes whose token is below the row's fence.

`UPDATE … SET …, last_fencing_token = :token, last_write_id = :new WHERE … AND last_fencing_token <= :token`,
and for objects `AND last_write_id = :loaded`: check and write are one statement. The guard adds this
condition to an UPDATE or DELETE, or refuses the statement. No module here depends on an authority.
"""

from fencelock.guard._claim import claim, claim_all
from fencelock.guard._fenced_text import fenced_text
from fencelock.guard._gate import fence_table, gate
from fencelock.guard._upsert import upsert
from fencelock.guard.leases import bind
from fencelock.guard.model import FencedDataclassModel, FencedModel
from fencelock.guard.model import fence_column as fence_column
from fencelock.guard.model import write_id_column as write_id_column
from fencelock.guard.receipts import Receipt, once, prune_receipts, receipt_table
from fencelock.guard.sessions import bypass
from fencelock.guard.sql import conditional_delete, conditional_update

#: The names that `fencelock` itself has, too.
__all__ = [
    "FencedDataclassModel",
    "FencedModel",
    "Receipt",
    "bind",
    "bypass",
    "claim",
    "claim_all",
    "conditional_delete",
    "conditional_update",
    "fence_table",
    "fenced_text",
    "gate",
    "once",
    "prune_receipts",
    "receipt_table",
    "upsert",
]

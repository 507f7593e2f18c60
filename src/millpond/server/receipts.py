"""Receipts as text for clients: opaque, with the queue and the attempts before this delivery."""

from __future__ import annotations

import base64
import binascii
from typing import Annotated
from uuid import UUID

import msgspec
from msgspec import Meta

from millpond.errors import InvalidOption
from millpond.message import Claim, Receipt

_LONGEST = 2000


class ClaimReceipt(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A receipt, and facts of its claim that a nack needs.

    Only id and token give a right, and the token is a random number. A changed queue or number gives none.
    """

    id: UUID
    token: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
    queue: str
    attempts: Annotated[int, Meta(ge=0, le=2**31 - 1)]
    shard: str | None = None
    """Name of the shard that has the message, in a pond of several databases."""

    @classmethod
    def of(cls, claim: Claim) -> ClaimReceipt:
        receipt = claim.receipt
        return cls(receipt.id, receipt.token, claim.message.queue, claim.attempts, receipt.shard)

    @property
    def receipt(self) -> Receipt:
        return Receipt(self.id, self.token, self.shard)


def receipt_text(claim: Claim) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode(ClaimReceipt.of(claim))).decode().rstrip("=")


def parse_receipt(text: str) -> ClaimReceipt:
    try:
        if len(text) > _LONGEST:
            raise ValueError
        decoded = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        return msgspec.json.decode(decoded, type=ClaimReceipt)
    except (ValueError, binascii.Error, msgspec.MsgspecError, RecursionError):
        raise InvalidOption(f"{text[:40]!r} is not a receipt of this server") from None

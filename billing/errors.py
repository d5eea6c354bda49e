"""Every refusal of the billing package, in one tree.

A caller maps the branch it cares about: `MeterRefusal` means that no work may
start now (the gateway answers 503), `UnpricedModel` that it may never.
"""

from __future__ import annotations


class BillingError(Exception):
    """The root."""


class UnsupportedDatabase(BillingError):
    """The URL names no database that this package runs on."""


class SchemaUnknown(BillingError):
    """The database was migrated by newer code than this."""


class DatabaseUnavailable(BillingError):
    """The database did not answer in time."""


class InvalidName(BillingError):
    """A tenant's name or a key's label that cannot be shown or stored."""


class NameTaken(BillingError):
    """The name is in use; names are unique."""


class UnknownTenant(BillingError):
    """No such tenant."""


class UnknownProject(BillingError):
    """The tenant has no such project, or it is archived and takes no more keys."""


class UnknownZone(BillingError):
    """No time zone of the IANA database has the name."""


class InvalidPeriod(BillingError):
    """Not a month, or a period that ends before it starts."""


class PeriodOpen(BillingError):
    """The period may still change, so there is no statement of it."""


class StatementOutOfOrder(BillingError):
    """A period before it has usage and no statement: its residual and its usage come first."""


class UnknownStatement(BillingError):
    """No statement was issued for the period."""


class UnknownReconciliation(BillingError):
    """No reconciliation has the id."""


class UnknownRequest(BillingError):
    """No request has the id, or none of the tenant that asks."""


class UnknownKey(BillingError):
    """No such key."""


class MalformedKey(BillingError):
    """The text presented has not the form of a key, so it is none."""


class InvalidPriceBook(BillingError):
    """The book breaks a loading rule; nothing of it was published."""


class InvalidDiscount(BillingError):
    """A discount is a share of the price."""


class BackdatedPrice(BillingError):
    """The version would change a price that is or was in force."""


class UnpricedModel(BillingError):
    """No price in force for the model: priced traffic is refused, never free."""


class InvalidUsage(BillingError):
    """Counts that cannot be: negative, or beyond any real request."""


class AmountTooLarge(BillingError):
    """The amount of one line does not fit 64 bits."""


class JournalInUse(BillingError):
    """Another live process holds this journal directory."""


class JournalCorrupted(BillingError):
    """Damage before the tail of a journal file: no crash does that, so a person must look."""


class DuplicateRequest(BillingError):
    """The request id was admitted before."""


class MeterRefusal(BillingError):
    """No work may start now, because it could not be metered."""


class MeterOverloaded(MeterRefusal):
    """A bounded queue is full."""


class MeterUnavailable(MeterRefusal):
    """The database or the journal cannot be written at the moment."""


class MeterClosed(MeterRefusal):
    """The meter was closed, or never started."""


class InvalidBudget(BillingError):
    """A budget that names a scope or an amount that cannot be."""


class BudgetBelowPosted(InvalidBudget):
    """More was spent in the period than the budget would allow."""


class UnknownBudget(BillingError):
    """No such budget, or it was removed."""


class BudgetExceeded(BillingError):
    """The most that the request can cost does not fit into a budget. Waiting does not help."""


class InvalidLimit(BillingError):
    """A rate limit that cannot be."""


class LimitReached(BillingError):
    """A rate or concurrency limit has no room for the request now."""


class InvalidAmount(BillingError):
    """A text that is no exact amount of dollars."""


class InvalidReceiptKey(BillingError):
    """Not a key that receipts can be signed or checked with."""


class UnknownReceipt(BillingError):
    """No receipt has been issued for the request, or none to the tenant that asks."""


class InvalidPromise(BillingError):
    """A report of a broken promise that cannot be: of other tokens, times or words than were written."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field

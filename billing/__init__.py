"""Who owes what: tenants, keys at rest, the price book, the ledger, the reports.

Knows counts of tokens, prices, tenants and time. Does not know HTTP, the text
or ids of tokens, tensors, or any sibling package.

The road of one request's money:

    Meter.admit    a request row, before any work        may refuse
    Meter.settle   a record in the local journal         never blocks on the database
    (posting)      event + ledger lines, one transaction  exactly once, by constraint
    (sweep)        what a crashed process left admitted   aborted, from the last evidence
    usage_report   the events and lines of a period       exact integers
    issue_statement  a closed month, once                 one document, with its digest

Money is integer picodollars (`Picodollars`); one picodollar per token is one
micro-dollar per million tokens. Instants are integer microseconds since the
Unix epoch, UTC (`Microseconds`). Ids are UUIDv7. There is no float here.

| module     | what it owns                                                    |
| ---------- | --------------------------------------------------------------- |
| `ids`      | id types and where new ids come from                            |
| `instants` | the clock, and 15-minute UTC buckets                            |
| `money`    | picodollars to exact decimal strings                            |
| `errors`   | every refusal of this package, one tree                         |
| `usage`    | values: `TokenCounts`, `Admission`, `UsageEvent`                |
| `schema`   | the tables                                                      |
| `db`       | engines, transactions, migration                                |
| `accounts` | tenants and API keys                                            |
| `prices`   | the price book and its versions                                 |
| `ledger`   | rating (pure) and posting (one transaction)                     |
| `journal`  | checksummed local records that outlive the process              |
| `meter`    | admit, observe, settle, flush, sweep                            |
| `calendar` | where a zone's days, hours and months begin                     |
| `totals`   | what usage adds up to, as values                                |
| `sums`     | exact sums in SQL                                               |
| `names`    | what people call a tenant's ids                                 |
| `reports`  | usage by span of time, project, key and model                   |
| `exports`  | the ledger, page by page                                        |
| `statements` | a month's statement as a value: lines, cents, residuals       |
| `receipt_keys` | keys that receipts are signed with                          |
| `receipts` | a receipt as a value: written, signed, checked                  |
| `receipt_chain` | receipts as rows: due, issued, found again                 |
| `sealer`   | the thread that issues receipts after posting                   |
| `credits`  | broken promises, paid back                                      |
| `issuing`  | statements are drawn up, issued and found again                 |
"""

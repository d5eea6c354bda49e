"""The dashboard: pages for people, rendered on the server, next to the API.

Knows sessions, forms, templates and figures. Does not know SQL, prices or workers:
every number comes from billing's reports as it stands there.

| module     | what it owns                                                   |
| ---------- | -------------------------------------------------------------- |
| `routes`   | the dashboard put together                                     |
| `visits`   | the door: who is visiting, whose figures they may see          |
| `sign_in`  | signing in with a key, and out                                 |
| `sessions` | who is signed in, and until when                               |
| `forms`    | reading a posted form, and proof that it is one of ours        |
| `filters`  | which period a page is about                                   |
| `panels`   | tiles, panels, tables and cells, as values (pure)              |
| `charts`   | series as Plotly figures (pure); `figures` has the day's       |
| `pages`    | templates, and the headers that every page carries             |
| `assets`   | scripts and styles, with addresses that change with the content |
| `live`     | what workers' caches did and hold, asked for now               |

Pages, each a module with `routes`: `today` (with `usage`), `cache` (with `cache_live`), `spending`,
`requests` (with `receipts`), `statement_pages` (with `statements`), `prefixes`,
`tenants`, `price_pages`, `workers`.
"""

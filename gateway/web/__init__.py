"""The dashboard: pages for people, rendered on the server, next to the API.

Knows sessions, forms, templates and figures. Does not know SQL, prices or workers:
every number comes from billing's reports as it stands there.

| module     | what it owns                                                   |
| ---------- | -------------------------------------------------------------- |
| `routes`   | the pages' addresses, and who may see what                     |
| `sessions` | who is signed in, and until when                               |
| `forms`    | reading a posted form, and proof that it is one of ours        |
| `usage`    | a usage report as rows and hours (pure)                        |
| `statements` | a statement as a page that prints (pure)                     |
| `figures`  | hours as a Plotly figure (pure)                                |
| `pages`    | templates, and the headers that every page carries             |
| `assets`   | scripts and styles, with addresses that change with the content |
"""

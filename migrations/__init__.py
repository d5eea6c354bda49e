"""The history of the schema, as Alembic versions, for SQLite and PostgreSQL alike.

Versions spell out their own tables and never import the application's: a
version keeps meaning what it meant. `billing.db.migrate` runs them; so does the
`alembic` command, with `HEADSTART_DATABASE_URL` set.
"""

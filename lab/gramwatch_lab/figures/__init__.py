"""Pictures of results, drawn from tables: one file per kind."""

"""A guard at work: as one exported graph, as an HTTP service, and on a page of its own."""

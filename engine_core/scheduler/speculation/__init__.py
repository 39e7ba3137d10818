"""Which sequences get drafts, and how many. Who makes them is not known here."""

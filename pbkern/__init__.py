"""pbkern: a Pallas-style kernel DSL with an auto-fusing front end."""

"""Reading and re-tracing jaxprs: the only surgery on jaxprs in pbkern."""

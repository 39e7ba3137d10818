"""Tool calls in a model's text. A format's file knows one family's markers; none knows of HTTP."""

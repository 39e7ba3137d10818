"""Tools that the server runs for its callers: servers of the Model Context Protocol."""

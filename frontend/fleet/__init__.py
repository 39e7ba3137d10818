"""Several engines of one model behind one client: who gets a request, and what each has cached."""

"""What a request has beside its tokens: its content, its account, what it reports, its beams."""

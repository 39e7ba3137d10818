"""One engine as its client sees it: started, connected to, lost and found again."""

"""Load on a daemon or server: arrivals, requests, client processes, records, reports."""

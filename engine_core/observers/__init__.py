"""Watch the loop from outside it: timings, traces, live views, the watchdog. The loop knows none
of them by name."""

"""The comparison with other engines: workloads, engines, rounds, figures, report."""

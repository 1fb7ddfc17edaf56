"""Two servers behind a balancer, under traffic good and bad, while faults are injected."""

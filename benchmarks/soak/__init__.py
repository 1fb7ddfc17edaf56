"""Injects faults into two servers behind a balancer, under traffic good and bad."""

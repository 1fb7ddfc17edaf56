"""Injects faults into two servers behind a balancer, under good and bad traffic."""

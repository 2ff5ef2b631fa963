"""Replicas as a model: physics kernels, fleets in virtual time, and servers in real time."""

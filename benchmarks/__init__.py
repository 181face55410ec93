"""Measurements that decide something. Each prints ratios of things measured in one run."""

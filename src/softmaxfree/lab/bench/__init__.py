"""Measurements: contestants side by side in one run, and the machine they ran on."""

"""Verification of per-request lengths: layout, acceptance."""

"""The decision: how many drafted tokens are worth verifying. Imports torch only, never sglang."""

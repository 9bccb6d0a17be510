"""Presets and cost files; installed as libraspec_sglang.configs."""

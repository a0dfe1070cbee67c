"""Runs programs that a policy wrote, each in a sandbox of its own; README.md says what that holds off and what not."""

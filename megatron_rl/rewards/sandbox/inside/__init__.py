"""What runs inside a sandbox, as text for the interpreter there: imports nothing of this package."""

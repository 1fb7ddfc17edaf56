"""Downloads objects within a deadline, and says what a refusal means."""

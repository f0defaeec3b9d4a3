"""What a run takes, before it is paid for: memory, operations and time on devices that need not be here."""

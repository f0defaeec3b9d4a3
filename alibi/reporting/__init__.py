"""From result rows to tables, figures and a report. Knows nothing about models."""

"""What is made of records: figures, leaderboard, verdicts on claims, report, numbers in pages."""

"""What people read: tables in pages, the leaderboard, the paper's claims, figures and the report, all from records.

tda-bench publish figures|report|leaderboard|claims|numbers
"""

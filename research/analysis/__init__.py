"""What results say: which models keep a stated risk, values over seeds."""

"""What the bench measures: methods side by side, their times and acceptance."""

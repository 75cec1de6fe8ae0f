"""What measures: scripts, and the packages `conv` and `models`. Run from a clone; none of it is installed."""

"""What measures: scripts, and the package `conv`. Run from a clone; none of it is installed."""

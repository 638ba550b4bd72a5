"""Results for people and for programs: lines, JSON, progress."""

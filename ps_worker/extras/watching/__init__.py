"""Looking at servers from outside of a job: their status, as lines, or as a screen that moves."""

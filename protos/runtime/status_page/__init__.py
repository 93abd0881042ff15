"""A page that shows the status of a process, live, in a browser that reaches nothing but the process."""

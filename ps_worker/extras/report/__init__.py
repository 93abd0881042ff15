"""`ps-worker report`: one HTML page about runs, from what they wrote into `run.dir`."""

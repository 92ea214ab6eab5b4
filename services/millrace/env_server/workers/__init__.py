"""The worker processes of environments: started, asked to play, watched, replaced."""

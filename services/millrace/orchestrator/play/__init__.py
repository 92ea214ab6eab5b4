"""What is played: which tasks, where, how often, and what came of it; nothing here knows the loop or the run's drive.

`play` is the state machine of one task, `book` holds what is open and what is resolved, `intake` brings both every
rollout that `rollout_stream` reads, `player` sends them out, to a replica that `routing` picks. `tasks` and `admission`
say what is trained on and when; `evals` evaluates, on the same player. `settings` is what the purposes differ in.
"""

"""What is played: which tasks, where, how often, and what came of it; nothing here knows the loop or the run's drive.

`play` is the state machine of one task, `book` holds what is open and what is resolved, and `intake` gives them every
rollout that `rollout_stream` reads. `player` asks the env-servers of `env_servers` to play, on a replica that `routing`
picks. `tasks` and `admission` say what is trained on and when; `evals`, with `eval_stats`, evaluates with the same
player. `settings` is what training and evaluation differ in.
"""

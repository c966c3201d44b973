"""Takes turns: every peer once a round, medians over rounds, ratios within one run."""

import json
import statistics
import time


class Table:
    """Prints a table and, if asked, writes one JSON object a line."""

    def __init__(self, file, ours):
        self.file, self.ours = open(file, "w") if file else None, ours

    def run(self, what, tokens, peers, seconds, inputs):
        """peers: name -> function(input). Each round has a new input."""
        first, times = {}, {name: [] for name in peers}
        end, rounds = time.perf_counter() + seconds * len(peers), 0
        while rounds < 3 or (time.perf_counter() < end and rounds < 50):
            given = inputs()
            for name, function in peers.items():
                begin = time.perf_counter()
                function(given)
                took = (time.perf_counter() - begin) * 1e3
                if name in first:
                    times[name].append(took)
                else:
                    first[name] = took
            rounds += 1
        median = {name: statistics.median(taken) for name, taken in times.items()}
        best = min((m for name, m in median.items() if not name.startswith(self.ours)), default=float("nan"))
        for name, m in median.items():
            text = "x the best other" if name.startswith(self.ours) else "of the best other"
            print(f"{what:8} {tokens:5} {name:34} first {first[name]:9.2f} ms, then {m:9.2f} ms {best / m:6.2f} {text}",
                  flush=True)
            if self.file:
                print(json.dumps({"peer": name, "pass": what, "tokens": tokens, "ms_first": round(first[name], 4),
                                  "ms_median": round(m, 4), "ratio": round(best / m, 4), "rounds": rounds}),
                      file=self.file, flush=True)
        print(flush=True)

"""One colony in plain Python numbers and lists, written from the description of the model alone."""

import math

BONUS = ((0.25, 50.0), (0.5, 150.0), (0.75, 300.0), (0.9, 500.0))
ENDS = {0: 0.0, 1: 500.0, 2: -15.0, 3: -100.0, 4: -100.0, 5: -50.0, 6: 0.0}


class ColonyTwin:
    """A colony on a substrate 400 x 400 with at most 100 nodes, unless said otherwise."""

    def __init__(self, xs, ys, *, size=(400.0, 400.0), critical=100, slope=0.01, intercept=1.0, field="linear", **more):
        self.nodes = [{"x": x, "y": y, "age": 0, "pid": i} for i, (x, y) in enumerate(zip(xs, ys, strict=True))]
        self.width, self.height = size
        self.critical, self.slope, self.intercept, self.field = critical, slope, intercept, field
        self.limit, self.full = more.get("limit", 1000), more.get("full", False)
        self.confine = more.get("confine", True)
        self.goal = 0.95 * self.width
        self.next_pid, self.steps, self.left, self.moved = len(self.nodes), 0, 0, 0.0
        self.center = self.mean("x")
        self.passed = sum(self.center >= share * self.goal for share, _ in BONUS)

    def mean(self, name):
        return math.fsum(node[name] for node in self.nodes) / len(self.nodes) if self.nodes else 0.0

    def firmness(self, x):
        place = math.floor(min(max(x, 0.0), self.width - 1.0))
        if self.field == "linear":
            return self.slope * place + self.intercept
        return self.intercept * math.exp(self.slope * place)

    def mean_firmness(self):
        return math.fsum(self.firmness(n["x"]) for n in self.nodes) / len(self.nodes) if self.nodes else 0.0

    def kept_in(self, value, extent):
        margin = max(2.0, 0.01 * extent)
        return min(max(value, margin), extent - margin) if self.confine else value

    def leftmost(self, delta):
        """Nodes that a share deletes; Python's sort is stable, so that equal ones go by their place in the list."""
        return [n["pid"] for n in sorted(self.nodes, key=lambda n: n["x"])[: math.floor(delta * len(self.nodes))]]

    def step(self, deleted, gamma, alpha, noise, theta):
        """Reward columns and outcome of one step in which the nodes of these numbers are deleted."""
        before, mean = self.nodes, self.mean_firmness()
        marked = {n["pid"] for n in before if softer(self.firmness(n["x"]), mean)}
        stay = [n for n in before if n["pid"] not in deleted]
        pairs = []
        for parent in stay:
            firm = self.firmness(parent["x"])
            radius = gamma / (1.0 + (alpha / firm) ** 2) + noise
            x = self.kept_in(parent["x"] + radius * math.cos(theta), self.width)
            y = self.kept_in(parent["y"] + radius * math.sin(theta), self.height)
            pairs.append((parent, {"x": x, "y": y, "age": 0, "pid": self.next_pid}))
            self.next_pid += 1
        self.nodes = [{**n, "age": n["age"] + 1} for n in stay] + [child for _, child in pairs]
        self.steps += 1
        center = self.mean("x") if self.nodes else self.center
        self.moved, self.center = center - self.center, center
        self.left = self.left + 1 if self.moved < 0 else 0
        old = self.passed
        self.passed = max(old, sum(center >= share * self.goal for share, _ in BONUS))
        outcome = self.outcome()
        return self.columns(before, marked, set(deleted), pairs, old, outcome), outcome

    def outcome(self):
        inside = all(0 <= n["x"] <= self.width and 0 <= n["y"] <= self.height for n in self.nodes)
        for code, applies in (
            (2, len(self.nodes) > self.critical),
            (3, not self.nodes),
            (4, not inside),
            (5, self.left >= 30),
            (1, any(n["x"] >= self.goal for n in self.nodes)),
            (6, self.steps >= self.limit),
        ):
            if applies:
                return code
        return 0

    def near(self, y):
        return min(y, self.height - y) / self.height

    def columns(self, before, marked, deleted, pairs, old, outcome):
        count, mean = len(self.nodes), self.mean_firmness()
        boundary, contrast, spawn, edge, ahead = [], [], [], [], []
        for node in self.nodes:
            near, firm = self.near(node["y"]), self.firmness(node["x"])
            zones = -5.0 if near < 0.03 else -2.0 if near < 0.08 else -0.5 if near < 0.15 else 0.0
            boundary.append(0.05 if near >= 0.35 else zones)
            contrast.append(-0.3 if softer(firm, mean) else 1.5 if softer(mean, firm) else 0.0)
        for parent, child in pairs:
            near = self.near(child["y"])
            gain = self.firmness(child["x"]) - self.firmness(parent["x"])
            spawn.append(-8.0 if near < 0.03 else -3.0 if near < 0.08 else 2.5 if gain >= 2.5 else -1.0)
            ahead.append(child["x"] - parent["x"])
            edge.append(0.5 if ahead[-1] > 0 else -0.05)
        deletion = 0.0
        for node in before:
            wanted, gone = node["pid"] in marked, node["pid"] in deleted
            deletion += 2.0 if wanted and gone else -2.0 if wanted != gone else 0.0
        end = ENDS[outcome] if self.full else min(max(0.02 * ENDS[outcome], -10.0), 10.0)
        return [
            -5.0 if count < 2 else 0.0,
            -3.0 * (1.0 + (count - 50) / 50) if count > 50 else 0.0,
            0.1,
            0.01 * len(before),
            5.0 * self.moved / (1.0 if self.full else self.goal),
            3.0 * average(ahead),
            0.3 * mean,
            average(boundary),
            average(contrast),
            sum(spawn),
            sum(edge),
            deletion,
            sum(worth for _, worth in BONUS[old : self.passed]),
            end,
        ]

    def node_rows(self):
        """The 11 features of each node."""
        if not self.nodes:
            return []
        xs, mean, top = [n["x"] for n in self.nodes], self.mean_firmness(), self.top()
        low, span = min(xs), max(xs) - min(xs)
        return [
            [
                n["x"] / self.width,
                n["y"] / self.height,
                self.firmness(n["x"]) / top,
                (n["x"] - self.mean("x")) / (0.1 * self.width),
                (n["y"] - self.mean("y")) / (0.1 * self.height),
                (n["x"] - low) / span if span else 0.0,
                n["age"] / (n["age"] + 10),
                float(n["age"] == 0),
                (self.goal - n["x"]) / self.width,
                2.0 * self.near(n["y"]),
                float(softer(self.firmness(n["x"]), mean)),
            ]
            for n in self.nodes
        ]

    def top(self):
        return max(self.firmness(0.0), self.firmness(self.width))

    def graph_row(self):
        """The 19 features of the colony."""
        count, top = len(self.nodes), self.top()
        xs, ys = [n["x"] for n in self.nodes] or [0.0], [n["y"] for n in self.nodes] or [0.0]
        age = self.mean("age")
        return [
            count / self.critical,
            self.mean("x") / self.goal,
            math.log(count + 1) / math.log(1 + 2 * self.critical),
            self.mean("y") / self.height,
            deviation(xs) / (0.1 * self.width),
            deviation(ys) / (0.1 * self.height),
            *(min(xs) / self.width, max(xs) / self.width, min(ys) / self.height, max(ys) / self.height),
            self.mean_firmness() / top,
            self.firmness(min(xs)) / top if count else 0.0,
            self.firmness(max(xs)) / top if count else 0.0,
            (self.goal - max(xs)) / self.width if count else 0.0,
            self.moved / (0.1 * self.width),
            self.left / 30,
            self.steps / self.limit,
            self.passed / 4,
            age / (age + 10),
        ]


def average(values):
    return math.fsum(values) / len(values) if values else 0.0


def softer(one, other):
    """Less by more than rounding."""
    return one < other and not math.isclose(one, other, rel_tol=1e-5)


def deviation(values):
    mean = average(values)
    return math.sqrt(average([(value - mean) ** 2 for value in values]))

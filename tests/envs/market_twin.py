"""OptionMarket once more, in scalars of Python: indicators by plain formulas on the whole series, one env at a time."""

import itertools
import math

from torchrl_perf.envs.market.settings import MarketSettings

MEMORY = 20


def ema(values, period):
    """Exponential averages of each prefix, from the first value on."""
    out = [values[0]]
    for value in values[1:]:
        out.append(out[-1] + 2 / (period + 1) * (value - out[-1]))
    return out


def wilder(changes, period=14):
    """Wilder's average of all changes: the mean of the first ones, then a weight of 1 / period for each further one."""
    average = sum(changes[:period]) / period
    for change in changes[period:]:
        average = (average * (period - 1) + change) / period
    return average


def mean(values):
    return sum(values) / len(values)


def plain_row(closes, clock, bars_per_week):
    """The 23 columns of the last of all closes."""
    p, changes = closes[-1], [b - a for a, b in itertools.pairwise(closes)]
    logs = [math.log(b / a) for a, b in itertools.pairwise(closes)]
    sma10, sma20 = mean(closes[-10:]), mean(closes[-20:])
    fast, slow = ema(closes, 12), ema(closes, 26)
    lines = [a - b for a, b in zip(fast, slow, strict=True)]
    macd, signal = lines[-1], ema(lines, 9)[-1]
    gain, loss = wilder([max(c, 0.0) for c in changes]), wilder([max(-c, 0.0) for c in changes])
    std = math.sqrt(mean([(c - sma20) ** 2 for c in closes[-20:]]))
    path = sum(abs(r) for r in logs[-20:])
    angle = 2 * math.pi * clock / bars_per_week
    percent = [
        *(math.log(p / closes[-1 - lag]) for lag in (1, 5, 10, 20)),
        *(p / sma10 - 1, p / sma20 - 1, sma10 / sma20 - 1, p / fast[-1] - 1, p / slow[-1] - 1),
        *(macd / p, signal / p, (macd - signal) / p),
    ]
    return [
        *(100 * value for value in percent),
        gain / (gain + loss) if gain + loss else 0.5,
        100 * wilder([abs(c) for c in changes]) / p,
        (p - sma20) / (2 * std) if std else 0.0,
        100 * 4 * std / sma20,
        *(100 * math.sqrt(mean([r * r for r in logs[-n:]])) for n in (5, 20)),
        abs(math.log(p / closes[-21])) / path if path else 0.0,
        *(100 * (p / pick(closes[-24:]) - 1) for pick in (max, min)),
        math.sin(angle),
        math.cos(angle),
    ]


class Twin:
    """One env. ``closes`` are all closes up to the present one, ``clock`` that of the present one."""

    def __init__(self, closes, clock, score=0.0, *, semantics="target", reward="log_wealth", limit=672, **settings):
        self.settings = MarketSettings(**settings)
        self.semantics, self.reward, self.limit = semantics, reward, limit
        self.closes, self.clock, self.score = list(closes), clock, score
        self.rows = []
        for back in range(self.settings.window - 1, -1, -1):
            seen = self.closes[: len(self.closes) - back]
            self.rows.append(plain_row(seen, clock - back, self.settings.bars_per_week))
        self.begin()

    def begin(self):
        self.cash, self.shares, self.entry, self.peak = 1.0, 0.0, 0.0, 1.0
        self.realised = self.paid = 0.0
        self.held = self.idle = self.steps = 0
        self.purchases = [False] * MEMORY

    @property
    def price(self):
        return self.closes[-1]

    @property
    def equity(self):
        return self.cash + self.shares * self.price

    def wanted(self, action):
        """The notional that an action trades."""
        s, value, equity = self.settings, self.shares * self.price, self.equity
        if self.semantics == "target":
            return self.towards(action * s.max_weight)
        if abs(action) < 0.001:
            return 0.0
        if action < 0:
            return action * value if self.held >= s.min_hold else 0.0
        if sum(self.purchases) > s.most_buys * MEMORY:
            return 0.0
        share = s.buy_share * action
        if self.shares == 0:
            share = min(share, s.entry_cap)
        room = self.towards(s.max_weight)
        return min(share * equity, room) if room > 1e-5 * equity else 0.0

    def towards(self, weight):
        """The trade that brings the position to its weight of the equity after costs, found by bisection."""
        value, equity = self.shares * self.price, self.equity
        low, high = -20.0 * equity, 20.0 * equity
        for _ in range(200):
            middle = (low + high) / 2
            if value + middle < weight * (equity - self.settings.cost * abs(middle)):
                low = middle
            else:
                high = middle
        return (low + high) / 2

    def step(self, action, close, score=0.0):
        """Trade, and the next close; returns reward, notional, cost, and whether the episode ended."""
        s, p, before = self.settings, self.price, self.equity
        traded = self.wanted(min(max(action, -1.0), 1.0))
        if abs(traded) < 1e-14:
            traded = 0.0
        fee = s.cost * abs(traded)
        profit = self.trade(traded, p) - fee
        self.cash -= traded + fee
        self.realised += profit
        self.paid += fee
        self.idle = 1 if traded else self.idle + 1
        self.purchases = [*self.purchases[1:], traded > 0]
        self.closes.append(close)
        self.clock += 1
        self.score = score
        self.held = self.held + 1 if self.shares else 0
        self.steps += 1
        self.peak = max(self.peak, self.equity)
        self.rows = [*self.rows[1:], plain_row(self.closes, self.clock, s.bars_per_week)]
        if self.reward == "log_wealth":
            reward = math.log(max(self.equity / before, 1e-3))
        else:
            worth = s.pnl_scale * profit * (s.winner_factor if profit > 0 else 1.0)
            reward = min(max(worth, -s.pnl_clip), s.pnl_clip) - (0.0 if traded else s.hold_penalty)
        ruined = self.equity <= s.ruin
        return reward, traded, fee, ruined, self.steps >= self.limit

    def trade(self, traded, p):
        """Moves the shares; returns the gross profit of what was closed."""
        value = self.shares * p
        closing = -math.copysign(min(abs(traded), abs(value)), value) if traded * value < 0 else 0.0
        opening = traded - closing if abs(traded - closing) > 1e-13 else 0.0
        profit = -closing / p * (p - self.entry)
        left = self.shares + closing / p if abs(closing + value) > 1e-14 else 0.0
        if opening:
            if left == 0:
                self.entry, self.held = p, 0
            else:
                self.entry = (left * self.entry + opening) / (left + opening / p)
        self.shares = left + opening / p
        if self.shares == 0:
            self.entry, self.held = 0.0, 0
        return profit

    def observation(self):
        """The flat columns."""
        value, equity = self.shares * self.price, self.equity
        sentiment = 0.5 * (1 + math.erf(self.score / math.sqrt(2)))
        weights = [math.exp(k * 3 * self.score) for k in (-1, 0, 1)]
        entry = self.entry if self.shares else self.price
        sign = math.copysign(1, self.shares) if self.shares else 0
        row = dict(zip(("gap", "divergence", "rsi", "rough5", "rough20", "efficiency"), self.picked(), strict=True))
        return [
            *(value for bar in self.rows for value in bar),
            *(weight / sum(weights) for weight in weights),
            float(self.shares != 0),
            100 * (entry / self.price - 1),
            100 * sign * (self.price / entry - 1),
            self.held / 24,
            value / equity,
            *(math.log(equity), self.cash / equity, equity / self.peak - 1, self.realised, self.paid),
            *(self.idle / 24, sum(self.purchases) / MEMORY, self.steps / self.limit),
            *(sentiment, abs(2 * sentiment - 1), row["divergence"], row["rough20"]),
            *(row["rough5"] / row["rough20"] if row["rough20"] else 0.0, row["efficiency"]),
            *(float(row["rsi"] < 0.35), float(row["rsi"] > 0.65)),
            float(row["gap"] > 0 and row["divergence"] > 0),
            float(row["gap"] < 0 and row["divergence"] < 0),
        ]

    def picked(self):
        return [self.rows[-1][column] for column in (4, 6, 12, 16, 17, 18)]

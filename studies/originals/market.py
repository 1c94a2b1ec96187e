"""The market of options_market in a program that steps one env at a time: NumPy, and a dict of arrays at each bar."""

import math
from collections import deque
from typing import NamedTuple

import numpy as np

STAYS = (0.995, 0.98)
MEAN, SIGMA = (4e-5, -1e-4), (0.0008, 0.003)
CALM_SHARE, SCORES = 0.8, (0.5, -2.0)
"""Share of the bars in the first state, and what each state's mean is in units of the long-run deviation."""
SENTIMENT_DECAY, START_PRICE = 0.9, 100.0
WINDOW, HISTORY, WARM, WEEK, EPISODE = 24, 24, 40, 168, 672
BUY_SHARE, ENTRY_CAP, MOST_BUYS, MEMORY, MIN_HOLD, RUIN, HOLD, DUST = 0.45, 0.35, 0.7, 20, 2, 0.5, 0.001, 1e-5
COST = 0.00155
Observation = dict[str, np.ndarray]


class Bar(NamedTuple):
    """What the world does in one bar.

    Attributes:
        log_return: of the price.
        score: of the sentiment, standard normal.
    """

    log_return: float
    score: float


class MarketLoop:
    """One trader in a market of its own.

    An action in [-1, 1] buys for part of the equity or sells part of the position, within rules; the reward is the log
    growth of the equity.

    Args:
        seed: of the market.
        correlation: of the sentiment with the mean of the state that governs the next return.

    Attributes:
        closes: the last 24 closes, the present one last.
        averages: EMA12, EMA26, the MACD's signal, Wilder's averages of gains and losses.
        rows: indicators of the last 24 bars.
    """

    def __init__(self, seed: int | None = None, correlation: float = 0.0) -> None:
        self.rng, self.correlation = np.random.default_rng(seed), correlation
        self.regime = int(self.rng.random() >= CALM_SHARE)
        self.noise = self.rng.standard_normal()
        self.clock, self.bars = int(self.rng.integers(WEEK)), 0
        self.closes: deque[float] = deque([START_PRICE] * HISTORY, maxlen=HISTORY)
        self.averages = [START_PRICE, START_PRICE, 0.0, 0.0, 0.0]
        self.rows: deque[np.ndarray] = deque(maxlen=WINDOW)
        self.score = 0.0
        for _ in range(WARM + WINDOW):
            self.advance(self.draw())
        self.begin()

    @property
    def price(self) -> float:
        """The present close."""
        return self.closes[-1]

    @property
    def equity(self) -> float:
        """In units of the capital."""
        return self.cash + self.shares * self.price

    def begin(self) -> Observation:
        """The capital in cash, the price's level back at 100, the market as it is."""
        factor = START_PRICE / self.price
        self.closes = deque((close * factor for close in self.closes), maxlen=HISTORY)
        self.averages = [average * factor for average in self.averages]
        self.cash, self.shares, self.entry, self.peak = 1.0, 0.0, 0.0, 1.0
        self.realised = self.paid = 0.0
        self.held = self.idle = self.steps = 0
        self.buys: deque[bool] = deque([False] * MEMORY, maxlen=MEMORY)
        return self.observe()

    # -- the market ---------------------------------------------------------------------------------------------------

    def draw(self) -> Bar:
        """The next bar; draws random numbers."""
        log_return = MEAN[self.regime] + SIGMA[self.regime] * self.rng.standard_normal()
        if self.rng.random() >= STAYS[self.regime]:
            self.regime = 1 - self.regime
        self.noise = SENTIMENT_DECAY * self.noise + math.sqrt(1 - SENTIMENT_DECAY**2) * self.rng.standard_normal()
        known = self.correlation
        return Bar(log_return, known * SCORES[self.regime] + math.sqrt(1 - known * known) * self.noise)

    def advance(self, bar: Bar) -> None:
        """Price, averages and indicators one bar later."""
        before, price = self.price, self.price * math.exp(bar.log_return)
        self.closes.append(price)
        self.score, self.clock, self.bars = bar.score, (self.clock + 1) % WEEK, self.bars + 1
        fast, slow, signal, gain, loss = self.averages
        fast += 2 / 13 * (price - fast)
        slow += 2 / 27 * (price - slow)
        signal += 2 / 10 * (fast - slow - signal)
        weight = 1 / min(self.bars, 14)
        gain += weight * (max(price - before, 0.0) - gain)
        loss += weight * (max(before - price, 0.0) - loss)
        self.averages = [fast, slow, signal, gain, loss]
        self.rows.append(self.indicators())

    def indicators(self) -> np.ndarray:
        """The 23 columns of the present bar."""
        closes = np.array(self.closes)
        price = closes[-1]
        moves = np.diff(np.log(closes))
        last20 = closes[-20:]
        sma10, sma20 = closes[-10:].mean(), last20.mean()
        spread = last20.std()
        fast, slow, signal, gain, loss = self.averages
        returns = [math.log(price / closes[-1 - lag]) for lag in (1, 5, 10, 20)]
        length = np.abs(moves[-20:]).sum()
        angle = 2 * math.pi * self.clock / WEEK
        in_percent = [
            *returns,
            *(price / sma10 - 1, price / sma20 - 1, sma10 / sma20 - 1, price / fast - 1, price / slow - 1),
            *((fast - slow) / price, signal / price, (fast - slow - signal) / price),
        ]
        rough = [math.sqrt(np.square(moves[-count:]).mean()) for count in (5, 20)]
        row = [
            *(100 * value for value in in_percent),
            gain / (gain + loss) if gain + loss > 0 else 0.5,
            100 * (gain + loss) / price,
            (price - sma20) / (2 * spread) if spread > 0 else 0.0,
            100 * 4 * spread / sma20,
            *(100 * value for value in rough),
            abs(returns[3]) / length if length > 0 else 0.0,
            100 * (price / closes.max() - 1),
            100 * (price / closes.min() - 1),
            math.sin(angle),
            math.cos(angle),
        ]
        return np.array(row, np.float32)

    # -- the trader ---------------------------------------------------------------------------------------------------

    def step(self, action: float, bar: Bar | None = None) -> tuple[Observation, float, bool, bool]:
        """Trade at the close, and go to the next one.

        Returns:
            Observation, reward, and whether the episode was terminated, and truncated.
        """
        equity = self.equity
        self.trade(self.notional(float(np.clip(action, -1.0, 1.0))))
        self.advance(self.draw() if bar is None else bar)
        self.steps += 1
        self.idle += 1
        self.held = self.held + 1 if self.shares else 0
        after = self.equity
        self.peak = max(self.peak, after)
        return self.observe(), math.log(max(after / equity, 1e-3)), after <= RUIN, self.steps >= EPISODE

    def notional(self, action: float) -> float:
        """What an action trades for."""
        value, equity = self.shares * self.price, self.equity
        if abs(action) < HOLD:
            return 0.0
        if action < 0:
            return action * value if self.held >= MIN_HOLD else 0.0
        if sum(self.buys) / MEMORY > MOST_BUYS + 1e-6:
            return 0.0
        share = BUY_SHARE * action
        if not self.shares:
            share = min(share, ENTRY_CAP)
        gap = equity - value
        room = gap / (1 + math.copysign(COST, gap))
        return min(share * equity, room) if room > DUST * equity else 0.0

    def trade(self, traded: float) -> None:
        """Buy or sell for an amount, which costs."""
        value, fee = self.shares * self.price, COST * abs(traded)
        after = 0.0 if traded == -value else self.shares + traded / self.price
        closed = min(-traded, value) if traded < 0 else 0.0
        self.realised += (closed * (1 - self.entry / self.price) if closed else 0.0) - fee
        if traded > 0:
            self.entry = (self.shares * self.entry + traded) / after
        if not after:
            self.entry, self.held = 0.0, 0
        if traded:
            self.idle = 0
        self.buys.append(traded > 0)
        self.cash, self.shares, self.paid = self.cash - traded - fee, after, self.paid + fee

    def observe(self) -> Observation:
        """The five entries of the dict: 24 x 23, 3, 5, 8 and 10 numbers."""
        price, equity, is_open = self.price, max(self.equity, 1e-3), self.shares != 0
        value, row = self.shares * price, self.rows[-1]
        gap, divergence, rsi, rough5, rough20 = row[4], row[6], row[12], row[16], row[17]
        logits = np.exp(3 * np.array([-self.score, 0.0, self.score]) - 3 * abs(self.score))
        sentiment = 0.5 * math.erfc(-self.score / math.sqrt(2))
        position = [0.0] * 5
        if is_open:
            entry, profit = 100 * (self.entry / price - 1), 100 * (price / self.entry - 1)
            position = [1.0, entry, profit, self.held / 24, value / (self.cash + value)]
        portfolio = [
            *(math.log(equity), self.cash / equity, equity / self.peak - 1, self.realised, self.paid),
            *(self.idle / 24, sum(self.buys) / MEMORY, self.steps / EPISODE),
        ]
        regime = [
            *(
                sentiment,
                abs(2 * sentiment - 1),
                divergence,
                rough20,
                rough5 / rough20 if rough20 > 0 else 0.0,
                row[18],
            ),
            *(rsi < 0.35, rsi > 0.65, gap > 0 and divergence > 0, gap < 0 and divergence < 0),
        ]
        return {
            "technical": np.array(self.rows),
            "sentiment": (logits / logits.sum()).astype(np.float32),
            "position": np.array(position, np.float32),
            "portfolio": np.array(portfolio, np.float32),
            "regime": np.array(regime, np.float32),
        }

/**
 * Seeded random numbers. A stream is named by a seed and a path of labels, so that two places never
 * share one by accident and adding a consumer never shifts another: `Rng.of(seed, 'rollout', 3)`.
 *
 * Generator: sfc32 (Chris Doty-Humphrey, PractRand); labels are mixed by FNV-1a and splitmix32.
 * Not for secrets.
 */
export class Rng {
  #a: number;
  #b: number;
  #c: number;
  #d: number;
  #spare: number | null = null;

  private constructor(state: readonly [number, number, number, number]) {
    [this.#a, this.#b, this.#c, this.#d] = state;
  }

  static of(seed: number, ...path: (string | number)[]): Rng {
    let hash = 0x811c9dc5 ^ (seed >>> 0);
    hash = Math.imul(hash ^ Math.floor(seed / 0x100000000), 0x01000193);
    for (const part of path) {
      const text = typeof part === 'number' ? `#${part}` : part;
      for (let i = 0; i < text.length; i++) hash = Math.imul(hash ^ text.charCodeAt(i), 0x01000193);
      hash = Math.imul(hash ^ 0x2f, 0x01000193);
    }
    const next = () => {
      hash = (hash + 0x9e3779b9) | 0;
      let z = hash;
      z = Math.imul(z ^ (z >>> 16), 0x85ebca6b);
      z = Math.imul(z ^ (z >>> 13), 0xc2b2ae35);
      return z ^ (z >>> 16);
    };
    const rng = new Rng([next(), next(), next(), next()]);
    for (let i = 0; i < 12; i++) rng.uint32();
    return rng;
  }

  /** Uniform in [0, 2^32). */
  uint32(): number {
    const t = (((this.#a + this.#b) | 0) + this.#d) | 0;
    this.#d = (this.#d + 1) | 0;
    this.#a = this.#b ^ (this.#b >>> 9);
    this.#b = (this.#c + (this.#c << 3)) | 0;
    this.#c = (this.#c << 21) | (this.#c >>> 11);
    this.#c = (this.#c + t) | 0;
    return t >>> 0;
  }

  /** Uniform in [0, 1) with 32 bits. */
  float(): number {
    return this.uint32() / 0x100000000;
  }

  /** Uniform integer in [low, high], both included. */
  int(low: number, high: number): number {
    return low + Math.floor(this.float() * (high - low + 1));
  }

  /** Standard normal (Box-Muller). */
  normal(): number {
    if (this.#spare !== null) {
      const value = this.#spare;
      this.#spare = null;
      return value;
    }
    const radius = Math.sqrt(-2 * Math.log(1 - this.float()));
    const angle = 2 * Math.PI * this.float();
    this.#spare = radius * Math.sin(angle);
    return radius * Math.cos(angle);
  }

  pick<T>(items: readonly T[]): T {
    if (items.length === 0) throw new RangeError('pick from an empty list');
    return items[this.int(0, items.length - 1)] as T;
  }

  /** A shuffled copy (Fisher-Yates). */
  shuffle<T>(items: readonly T[]): T[] {
    const out = items.slice();
    for (let i = out.length - 1; i > 0; i--) {
      const j = this.int(0, i);
      [out[i], out[j]] = [out[j] as T, out[i] as T];
    }
    return out;
  }

  /** State to store in a checkpoint; `Rng.restore` continues the very same stream. */
  state(): [number, number, number, number, number | null] {
    return [this.#a, this.#b, this.#c, this.#d, this.#spare];
  }

  static restore(state: readonly [number, number, number, number, number | null]): Rng {
    const rng = new Rng([state[0], state[1], state[2], state[3]]);
    rng.#spare = state[4];
    return rng;
  }
}
